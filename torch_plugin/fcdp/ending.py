"""Ends FCDP with the interpreter, after the job's own exit functions.

atexit calls the function that was registered first last. With FCDP=1 this file is imported when the interpreter
starts, so the job's own functions run before and may still evaluate a model.
"""

import atexit
import sys


@atexit.register
def _end() -> None:
    runtime = sys.modules.get("fcdp.runtime")
    if runtime is not None:
        runtime.end()
