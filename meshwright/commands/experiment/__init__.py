"""`meshwright experiment run`: many runs of one base, judged in pairs of equal seed."""
