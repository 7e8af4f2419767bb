"""`python -m tests.compatibility.write`: runs every case, and writes `docs/compatibility.md` if all are as expected."""

import sys

from tests.compatibility.tables import PAGE, TABLES, check, render


def main() -> int:
    wrong = 0
    for cases in TABLES.values():
        for case in cases:
            try:
                check(case)
            except AssertionError as error:
                wrong += 1
                print(error, file=sys.stderr)
    if not wrong:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(render(), encoding="utf-8")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
