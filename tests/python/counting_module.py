"""A module with a counter in its globals, whose code asks for types."""

count = 0


def counting(x):
    global count
    count += 1
    return x.sin() if type(x).__name__ == "Tensor" else x.cos()
