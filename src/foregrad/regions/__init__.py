"""Python that graphs call: eager regions, custom Functions and hooks that no graph holds, and the marks of regions."""
