"""Shared by test modules: models, trainings, comparisons, faults, generators. Test modules import no other."""
