// Package loopback finds places for ranks to meet on this machine.
package loopback

import (
	"math/rand/v2"
	"net"
	"strconv"
)

// Host is a loopback address that nobody else is likely to use: one of 16 million, drawn at random. Ports of it need not be
// probed for, which leaves them free for somebody else to take before they are used.
func Host() string {
	n := 1<<16 + rand.IntN(1<<24-1<<17)
	return net.IPv4(127, byte(n>>16), byte(n>>8), byte(n)).String()
}

// Port is the port that ranks meet on where any will do: below those that the system gives to connections.
const Port = 29552

// Addr is Host with Port.
func Addr() string { return net.JoinHostPort(Host(), strconv.Itoa(Port)) }
