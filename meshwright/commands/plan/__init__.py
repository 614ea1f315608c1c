"""`meshwright plan`: the trainer's own step, run on fake tensors, and counted.

It knows devices by their data sheets. Rules of the mesh and the model's sizes are the trainer's.
"""
