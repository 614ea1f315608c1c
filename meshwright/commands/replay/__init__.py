"""`meshwright replay`: takes a step of a run again, and says which samples made it."""
