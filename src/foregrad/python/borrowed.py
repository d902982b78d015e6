"""NumPy arrays that the function reads by itself, and writes to through tensors over their memory.

A tensor over the memory of such an array is a constant of the graph: right while the array is unchanged, wrong after a
write. As an argument the array is written to by each call.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import UnsupportedSideEffectError
from ..frontend.answers import PlacesRead
from ..frontend.arrays import is_array, tensor_over
from ..tracing.aspect import Aspect, Finished, aspect
from ..tracing.heap.recording import Host, Recording
from .drawn_arrays import overlaps
from .effects import StatePlace


class ArraysWritten(UnsupportedSideEffectError):  # noqa: N818 - asks for another capture, with these as arguments
    """The function writes to arrays; the first is `array`. `places`: their places, if they can be arguments."""

    def __init__(self, name: str, array: str, places: tuple[StatePlace, ...]) -> None:
        super().__init__(
            f"`{name}` writes to a tensor over the array {array}; a compiled call would not repeat the write. Pass "
            "the array as an argument, or write to a copy (`torch.tensor(array)`)."
        )
        self.places = places


@aspect
class BorrowedArrays(Aspect):
    """The constants of one run over arrays."""

    def __init__(self, host: Host, recorder: Recording) -> None:
        self.recorder = recorder

    def finished(self, run: Finished) -> None:
        """Raise where the run wrote to an array of Python's state, older than the call."""
        written = [real for real, value in self.recorder.borrowed if value.storage.is_written]
        if not written:
            return
        host = self.recorder.host
        sites = [site for site in host.reads.places.values() if is_array(site.holder)]
        found = [site for site in sites if any(overlaps(site.holder, (real.numpy(),)) for real in written)]
        if found:
            places = {place.identity: place for site in found for place in _places_of(site.holder, host.reads)}
            raise ArraysWritten(host.name, found[0].name, tuple(places.values()))


def _places_of(array: object, reads: PlacesRead) -> Iterator[StatePlace]:
    if tensor_over(array) is None:
        return
    for site in reads.places.values():
        for key in site.keys_of(array):
            yield StatePlace.of_site(site, key, is_array=True)
