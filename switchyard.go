// Package switchyard says which version of Switchyard this is. What Switchyard does is in the packages beside it: begin with
// [github.com/switchyard-moe/switchyard/stack], or with comm, memory, dispatch, alltoallv and allreduce one by one.
package switchyard

// Version is the release that this source belongs to, without a leading v. The Go module, the Python package and the command
// switchyard are released together, so there is one number.
const Version = "0.2.0"
