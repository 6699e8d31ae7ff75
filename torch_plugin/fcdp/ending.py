"""Ends FCDP with the interpreter, after the job's own exit functions.

atexit calls the function that was registered first last. With FCDP=1 this file is imported when the interpreter
starts, so the job's own functions run before and may still evaluate a model.
"""

import atexit
import os
import sys


@atexit.register
def _end() -> None:
    module = sys.modules.get("fcdp.runtime")
    if module is None or module.runtime.pid != os.getpid():  # nothing was served; a forked child
        return
    from fcdp import bypassed, report, settings, shard_groups

    bypassed.say_rest()
    settings.say_unread()
    if module.runtime.engine is None:
        return
    report.summary()
    module.runtime.end()
    for shards in shard_groups.served():
        shards.close()
