"""The node agent: it stands in for the kubelets of the rehearsal site and runs containers as local processes."""
