"""`meshwright prove`: a small copy of your job on one process and on meshes, compared.

The parts that it trains with are the trainer's own. `job.py` holds only the replacements: data in
memory, and initial values that let mistakes show.
"""
