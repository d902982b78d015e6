"""Tools: `explain`, `verify` and the commands. They stand on what is public, as any package beside foregrad could."""
