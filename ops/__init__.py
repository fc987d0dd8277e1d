"""The call, the plan and the run: `library` → `checks` → `planner` → `strategies` → primitives."""
