"""Subcommands of the `cutefce` console command, one module each; `common` holds what they share."""
