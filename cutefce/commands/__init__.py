"""The subcommands of the `cutefce` console command."""
