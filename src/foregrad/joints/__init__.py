"""The joint graph as a thing to be edited: `aot_export_joint_with_descriptors` and what compiles it again.

`layout` says what each input and output is, `graph` writes the graph that is handed out, `held` is the object that
holds it, `back` makes of an edited graph what the pipeline takes, `calls` renders the call, `doors` has the functions.
`exports` has `aot_export_module` and `aot_export_joint_simple`.
"""
