"""Tools: `explain`, `verify` and the commands. They stand on public names, as any package beside foregrad could."""
