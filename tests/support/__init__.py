"""What several test modules share: models, trainings, comparisons, faults, generators. Test modules import no other."""
