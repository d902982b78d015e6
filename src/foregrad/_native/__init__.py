"""The C++ part of calls: its sources, and `build`, which compiles them. `foregrad._torch.native` loads the result."""
