"""`meshwright ladder run`: models of growing size, a scaling law, and the loss of the next size."""
