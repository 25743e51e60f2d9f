// Package ucx is the rail over UCX (libucp), for memory of the host. The library is opened at run time: a machine without it, and a build
// without cgo, get [ErrUnavailable] from [Open].
//
// A put is one active message. Its header has the key of the group, the place, the word of the signal, and a number; the receiver checks
// all of them before it lands the bytes. Nobody gets a key to memory, so neither a stranger nor a mistake writes outside what is open.
//
// UCX reads variables of its own (UCX_TLS, UCX_NET_DEVICES). Messages above 256 KiB shake hands first.
package ucx

import "errors"

// ErrUnavailable means that there is no usable UCX. The error says why, and which package has the library where it is not there.
var ErrUnavailable = errors.New("UCX is not available")
