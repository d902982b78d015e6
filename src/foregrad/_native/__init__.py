"""The C++ part of calls: its sources, and `build`, their compiler. `foregrad._torch.native` loads the result."""
