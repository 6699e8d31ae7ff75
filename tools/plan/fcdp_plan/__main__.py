"""python -m fcdp_plan"""

import sys

from fcdp_plan.cli import main

sys.exit(main())
