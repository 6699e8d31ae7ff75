"""Every case of the bitwise matrix: import this to fill run.CASES.  A case trains an unmodified FSDP2 model and records
what must come out equal, bit for bit, with FCDP and without it."""

import cases_alone  # noqa: F401
import cases_basic  # noqa: F401
import cases_count  # noqa: F401
import cases_edit  # noqa: F401
import cases_flow  # noqa: F401
import cases_forms  # noqa: F401
import cases_freed  # noqa: F401
import cases_fsdp1  # noqa: F401
import cases_optim  # noqa: F401
import cases_outlive  # noqa: F401
import cases_pipeline  # noqa: F401
import cases_settings  # noqa: F401
import cases_shape  # noqa: F401
import cases_tools  # noqa: F401
import cases_torch  # noqa: F401
import cases_whole  # noqa: F401
