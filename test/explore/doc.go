// Package explore tests protocols by schedule exploration, in two ways.
//
// [Check] is a small explicit-state model checker: it visits every state that a [System] can reach, whatever the order in
// which its ranks act, and answers with the shortest trace to a broken promise. [Protocol] is the system of the exchange
// kernels: ranks that post credits, put data, signal and wait. Its programs are derived from the same kernels.ExchangeBounds and
// kernels.Routes that the engines get, so a plan or a layout that is wrong shows here.
// [Halves] and [Handle] are the systems of dispatch and combine, on the host and on GPUs, and [Masks] that of calls which go on without a rank.
// [Rail] is that of puts between hosts, [Queue] that of the queue by which kernels ask for them, and [Messages] that of messages between two
// GPUs. A bug put into a protocol must be found; that is what shows that the exploration sees anything.
//
// [Schedules] runs real code: every rank is a coroutine that gives the others a turn at named points, and the schedules
// are enumerated up to a number of deviations from the simplest one, then drawn at random. The host engine's own tests use
// it on the real kernels.
package explore
