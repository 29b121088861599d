"""The random core: keys, samplers and the counter-based generator under them (threefry-2x32, as JAX's default).

It knows tensors and counters only: no mesh, no spec. `spmdfn.random` is its public face.
"""

from .keys import fold_in as fold_in
from .keys import key as key
from .keys import split as split
from .samplers import bernoulli as bernoulli
from .samplers import bits as bits
from .samplers import normal as normal
from .samplers import permutation as permutation
from .samplers import randint as randint
from .samplers import uniform as uniform
