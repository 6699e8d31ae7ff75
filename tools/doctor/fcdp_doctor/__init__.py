"""fcdp-doctor: what FCDP sees on this machine, and what it would do."""
