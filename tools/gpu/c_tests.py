"""The C tests that take any driver, with every internal check."""

import re

from section import Failed, Section, ended, last_line, main

TESTS = (
    "test_alloc_pages",
    "test_alloc_pages_blocks",
    "test_alloc_vrange",
    "test_comm_fingerprint_device",
    "test_comm_codec_device",
)


def body(section: Section) -> None:
    for name in TESTS:
        try:
            job = section.run(name, limit_s=section.settings["seconds"] / 2, FCDP_CHECK="3")
        except Failed as error:
            section.check(name, False, str(error))
            continue
        passed, skipped = (
            len(set(re.findall(rf"^\[ +{word} \] ([a-z]\w+)$", job.stdout, re.M))) for word in ("OK", "SKIPPED")
        )
        failed = sorted(set(re.findall(r"^\[  FAILED  \] (?!tests:|\d)(\w+)", job.stdout, re.M)))
        section.figure(f"{name}: tests that passed", passed, "tests", name, skipped=skipped)
        bad = job.returncode not in (0, 77) or failed or not passed
        why = ", ".join(failed) or ("no test ran" if job.returncode in (0, 77) else last_line(job.stdout))
        section.check(name, not bad, f"{ended(job.returncode)}: {why}" if bad else "", name)


if __name__ == "__main__":
    main(body)
