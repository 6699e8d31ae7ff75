"""python -m fcdp_memtrace"""

import sys

from fcdp_memtrace.cli import main

sys.exit(main())
