module k2-release/infra/rehearsal/crds

go 1.26.0

require sigs.k8s.io/gateway-api v1.4.1
