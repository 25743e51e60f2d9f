// Package device says where bytes live and in which order work on them happens.
//
// A [Device] makes streams. A [Stream] runs the work enqueued on it one piece after the other, behind the caller's back;
// an [Event] marks a place in one stream for another to wait at. The host device is always there: its streams are
// queues with a worker each, so that asynchronous calls are asynchronous on a machine without a GPU too.
//
// Where a function of this module takes a Stream, nil means the calling goroutine itself: the work is done when the call
// returns, and its error is the call's. Only memory.Copy to or from a GPU needs a stream.
package device
