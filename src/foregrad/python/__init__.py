"""Python's state around a call: the function's reads, writes, draws and output. The names here answer the spine.

The seam is "Python's state", see `annexes.py`.
"""

from .._torch.asked import ReboundNames
from ..frontend.lifted import capturing
from ..frontend.objects import called_by_autograd
from ..frontend.program_state import ProgramState
from ..frontend.reads import Reads
from .draw_patches import drawing, not_drawing
from .draws import Draws
from .observed import Observed
from .seen_code import SeenCode
from .state import PythonState, RunArguments, refuse_change
from .writes import attribute_set_error

__all__ = [
    "Draws",
    "Observed",
    "ProgramState",
    "PythonState",
    "Reads",
    "ReboundNames",
    "RunArguments",
    "SeenCode",
    "attribute_set_error",
    "called_by_autograd",
    "capturing",
    "drawing",
    "not_drawing",
    "refuse_change",
]
