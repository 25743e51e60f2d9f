// Package observe shows what the ranks of a process do: how often they make which call, how long that takes, for whom they wait, what their
// heaps hold and what went wrong. The ranks note it themselves, always; this package reads it when somebody asks, and enqueues nothing.
//
//	http.Handle("/metrics", observe.Handler())
//
// A process with a communicator needs no call of this package for two ways in:
//
//   - SWITCHYARD_METRICS=:9400 serves [Handler] on a port of this host's loopback, the first rank of a process on port 9400 plus its local
//     rank. An address such as 0.0.0.0:9400 serves other hosts too. A path such as /var/lib/node_exporter/switchyard.prom names a file for
//     node_exporter's textfile collector, written anew every 10 seconds, with the rank's number in front of the ending.
//   - The commands switchyard status and switchyard dump ask every process of their user by a socket, which processes of other users are
//     turned away from.
//
// [OnEvent] tells of joins, growth, shrinking and admission, and [Families] has all metrics as values. Two modules of their own are written along
// them: observe/prom for client_golang, and observe/otel for OpenTelemetry. This package needs neither.
//
// Times of calls are those of the host. A GPU runs what it was given when the host has gone on, so calls on GPUs are counted and not timed.
// Numbers of ranks are those in the group that met first; after Shrink they stay as they were.
package observe
