"""Python's state around a call: the function's reads, writes, draws and output. The names here answer the spine.

The seam is "Python's state", see `annexes.py`.
"""

from ._torch.asked import ReboundNames
from .draw_patches import drawing, not_drawing
from .draws import Draws
from .expected import Expected
from .libraries import is_of_library
from .lifted import Lifted, capturing, lifted_paths
from .object_guards import object_lines
from .objects import called_by_autograd
from .observed import Observed
from .program_state import ProgramState
from .read_guards import ReadGuards
from .reads import Reads
from .seen_code import SeenCode
from .settings import note_settings
from .state import PythonState, RunArguments, refuse_change
from .stateful import only_written_by, render_stateful, state_that_varies
from .writes import attribute_set_error

__all__ = [
    "Draws", "Expected", "Lifted", "Observed", "ProgramState", "PythonState", "ReadGuards", "Reads", "ReboundNames",
    "RunArguments", "SeenCode", "attribute_set_error", "called_by_autograd", "capturing", "drawing", "is_of_library",
    "lifted_paths", "not_drawing", "note_settings", "object_lines", "only_written_by", "refuse_change",
    "render_stateful", "state_that_varies",
]  # fmt: skip
