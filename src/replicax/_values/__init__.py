"""Values that have one component for each replica, and the mesh of devices that they live on."""

from replicax._values.arrays import filled as filled
from replicax._values.arrays import is_array as is_array
from replicax._values.arrays import is_global as is_global
from replicax._values.arrays import is_text as is_text
from replicax._values.arrays import largest_of as largest_of
from replicax._values.arrays import part_of as part_of
from replicax._values.mapping import as_copies as as_copies
from replicax._values.mapping import as_rows as as_rows
from replicax._values.mapping import mapped as mapped
from replicax._values.mesh import AXIS as AXIS
from replicax._values.mesh import ReplicaMesh as ReplicaMesh
from replicax._values.per_replica import DistributedValues as DistributedValues
from replicax._values.per_replica import Mirrored as Mirrored
from replicax._values.per_replica import PerReplica as PerReplica
from replicax._values.per_replica import adopted as adopted
from replicax._values.per_replica import own_component as own_component
from replicax._values.regroup import arrays_of as arrays_of
from replicax._values.regroup import regroup as regroup
from replicax._values.regroup import select as select
