import sys

from fcdp_lab.cli import main

sys.exit(main())
