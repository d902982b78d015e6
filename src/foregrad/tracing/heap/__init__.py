"""The memory that a captured function's tensors lie in: storages, views, writes made functional."""
