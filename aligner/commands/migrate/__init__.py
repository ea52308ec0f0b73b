"""`aligner migrate`: what another framework's config or launch line is called here, key by key (tables/*.yaml)."""
