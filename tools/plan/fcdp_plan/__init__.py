"""fcdp-plan: whether a job fits, how long its step takes, and which setting is best, from described hardware."""
