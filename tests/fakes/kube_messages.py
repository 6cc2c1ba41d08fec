"""What a Kubernetes 1.36.3 says, word for word; tests/contract/site/test_scheduling.py has it say it anew."""

FULL = (
    "0/16 nodes are available: 16 Insufficient memory, 16 Insufficient nvidia.com/gpu. "
    "no new claims to deallocate, preemption: not eligible due to preemptionPolicy=Never."
)
MIXED = (
    "0/16 nodes are available: 1 node(s) had untolerated taint(s), 11 node(s) didn't match Pod's node "
    "affinity/selector, 2 Insufficient memory, 2 Insufficient nvidia.com/gpu, 2 node(s) were unschedulable. "
    "no new claims to deallocate, preemption: not eligible due to preemptionPolicy=Never."
)
LOW = (
    "0/16 nodes are available: 12 node(s) didn't match Pod's node affinity/selector, 4 Insufficient nvidia.com/gpu. "
    "no new claims to deallocate, preemption: 0/16 nodes are available: 12 Preemption is not helpful for scheduling, "
    "4 No preemption victims found for incoming pod."
)
EXCEEDED = (
    'pods "k2-decode-0-2" is forbidden: exceeded quota: gpus, requested: pods=1,requests.nvidia.com/gpu=8, '
    "used: pods=2,requests.nvidia.com/gpu=16, limited: pods=2,requests.nvidia.com/gpu=16"
)
FAILED_CREATE = (
    "Create Pod k2-decode-0-2 in StatefulSet k2-decode-0 failed error: "
    'pods "k2-decode-0-2" is forbidden: exceeded quota: gpus, requested: requests.nvidia.com/gpu=8, '
    "used: requests.nvidia.com/gpu=16, limited: requests.nvidia.com/gpu=16"
)
UNSTATED = 'pods "nocpu" is forbidden: failed quota: cpu: must specify requests.cpu for: engine'
