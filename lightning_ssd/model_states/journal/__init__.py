"""The journal of `recover=True`: the last committed step, from which a run resumes after a kill.

The modules, in the order in which they are best read:

- `plain_data`: serialization of plain data with a checksum, without pickles.
- `run_fingerprint`: settings of a training by name, which must be those of the killed run.
- `journal`: the record of the last committed step, and its thread.
"""

from lightning_ssd.model_states.journal.journal import (
    CommitRecord,
    Journal,
    check_paths,
    has_commit_record,
    read_commit_record,
    remove_record,
)
from lightning_ssd.model_states.journal.plain_data import NotPlainError, PlainData, encode
from lightning_ssd.model_states.journal.run_fingerprint import (
    RunFingerprint,
    describe,
    differences,
    model_settings,
    show,
    type_name,
)
