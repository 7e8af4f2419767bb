"""Every figure in the README comes out of a command here."""
