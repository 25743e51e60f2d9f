// Package cuda is the CUDA driver API, opened at run time. It is the only cgo of the library besides the C ABI, and it
// is thin: one method, one driver call, with typed errors.
//
// Building needs neither CUDA nor a GPU. A machine without the driver, and a build without cgo, get [ErrUnavailable]
// from [Open].
//
// Work goes to the device's primary context, which torch and others share. Every call makes the context current for
// its own duration and leaves the thread as it was. Streams, events, modules and addresses are plain handles, so that
// those of other libraries can be used; whoever made one releases it.
//
// The operations that an exchange enqueues are collected in a [Batch] and submitted in one cgo crossing.
//
// Multicast objects have been used with a driver that package emulated emulates, and never on hardware.
package cuda
