// Package device says where bytes live and in which order work on them happens.
//
// A [Device] makes streams. A [Stream] runs the work enqueued on it in order, asynchronously to the caller; an [Event] marks a
// position in one stream, and another stream can wait for it. Every machine has the host device: its streams are queues with
// a worker each, so asynchronous calls are asynchronous without a GPU too.
//
// Functions of this module that take a Stream accept nil, the calling goroutine itself: the work is done when the call
// returns, and its error is the call's. Only memory.Copy to or from a GPU needs a stream.
package device
