"""Which slots does each sequence own? One interface, several designs behind it."""
