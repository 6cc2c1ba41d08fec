"""The gateway of the rehearsal site: a real Envoy that follows HTTPRoutes of a real API server."""
