"""Ends FCDP with the interpreter, behind what the job itself does then.

atexit calls the function that was registered first last. In a job of FCDP=1 this file is imported when the
interpreter starts, so a function of the job's may still evaluate a model.
"""

import atexit
import sys


@atexit.register
def _end() -> None:
    runtime = sys.modules.get("fcdp.runtime")
    if runtime is not None:
        runtime.end()
