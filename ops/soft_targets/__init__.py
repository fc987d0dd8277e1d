"""Steps of soft targets on the kernels, and what they do where there are none.

rows.py       the rows of soft targets: leads, and the other classes sorted
kernels.py    launches of the kernels between the GEMMs
"""
