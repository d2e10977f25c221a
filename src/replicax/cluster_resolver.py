"""Cluster resolvers: classes that find out the processes of a cluster, and the rank of this one.

>>> import replicax as rx
>>> cluster = rx.ClusterSpec({"worker": ["localhost:2222"]})
>>> rx.cluster_resolver.SimpleClusterResolver(cluster, task_type="worker", task_id=0).cluster_spec().jobs
['worker']
"""

from replicax._cluster.environment import SageMakerClusterResolver, TFConfigClusterResolver
from replicax._cluster.explain import Explanation
from replicax._cluster.gce import GCEClusterResolver
from replicax._cluster.kubernetes import ExecutableLocation as KubernetesExecutableLocation
from replicax._cluster.kubernetes import KubernetesClusterResolver
from replicax._cluster.resolver import ClusterResolver, SimpleClusterResolver, UnionResolver
from replicax._cluster.slurm import SlurmClusterResolver
from replicax._cluster.spec import ClusterDef, ClusterSpec, JobDef
from replicax._cluster.tpu import TPUClusterResolver, TPUSystemMetadata

__all__ = [
    "ClusterDef",
    "ClusterResolver",
    "ClusterSpec",
    "Explanation",
    "GCEClusterResolver",
    "JobDef",
    "KubernetesClusterResolver",
    "KubernetesExecutableLocation",
    "SageMakerClusterResolver",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "TPUClusterResolver",
    "TPUSystemMetadata",
    "UnionResolver",
]
