//go:build cgo

package layout

// #include "args.h"
import "C"

import "unsafe"

// Of is every size, offset and constant of args.h that Go repeats, by the name Go gives it.
func Of() map[string]int {
	var a C.struct_sw_exchange_args
	var f C.struct_sw_fault
	var c C.struct_sw_control
	var st C.struct_sw_step
	return map[string]int{
		"maxRanks": C.SW_MAX_RANKS, "lineBytes": C.SW_LINE_BYTES, "packetGroupPayload": C.SW_PACKET_GROUP_PAYLOAD,
		"packetGroupBytes": C.SW_PACKET_GROUP_BYTES, "packetHeaderBytes": C.SW_PACKET_HEADER_BYTES,
		"sendThreads": C.SW_SEND_THREADS, "recvThreads": C.SW_RECV_THREADS, "packetThreads": C.SW_PACKET_THREADS,
		"watchThreads": C.SW_WATCH_THREADS, "itemBytes": C.SW_ITEM_BYTES, "tileBytes": C.SW_TILE_BYTES, "copyThreads": C.SW_COPY_THREADS, "ownThreads": C.SW_OWN_THREADS, "laneMinBytes": C.SW_LANE_MIN_BYTES,
		"aliasOffset": C.SW_ALIAS_OFFSET, "aliasShift": C.SW_ALIAS_SHIFT,
		"flagStaged": C.SW_STAGED, "flagMesh": C.SW_MESH,
		"faultTimeout": C.SW_FAULT_TIMEOUT, "faultAborted": C.SW_FAULT_ABORTED, "faultMismatch": C.SW_FAULT_MISMATCH,
		"faultPlace": C.SW_FAULT_PLACE, "faultSplits": C.SW_FAULT_SPLITS, "faultLimit": int(unsafe.Offsetof(f.limit)), "copyArgsBytes": C.sizeof_struct_sw_copy_args,
		"faultBytes": C.sizeof_struct_sw_fault, "faultKind": int(unsafe.Offsetof(f.kind)), "faultPeer": int(unsafe.Offsetof(f.peer)),
		"faultEpoch": int(unsafe.Offsetof(f.epoch)), "faultSent": int(unsafe.Offsetof(f.sent)), "faultExpect": int(unsafe.Offsetof(f.expected)),
		"faultSending": int(unsafe.Offsetof(f.sending)), "controlFault": int(unsafe.Offsetof(c.fault)),
		"argsBytes": C.sizeof_struct_sw_exchange_args, "argsSegments": int(unsafe.Offsetof(a.segments)), "argsDstOffset": int(unsafe.Offsetof(a.dst_offset)),
		"argsSplits": int(unsafe.Offsetof(a.splits)), "argsFault": int(unsafe.Offsetof(a.fault)),
		"argsControl": int(unsafe.Offsetof(a.control)), "argsPackets": int(unsafe.Offsetof(a.packets)),
		"argsSlotBytes": int(unsafe.Offsetof(a.slot_bytes)), "argsRank": int(unsafe.Offsetof(a.rank)),
		"argsFlags": int(unsafe.Offsetof(a.flags)), "argsSenders": int(unsafe.Offsetof(a.senders)), "argsOwn": int(unsafe.Offsetof(a.own_bytes)), "argsSteps": int(unsafe.Offsetof(a.steps)),
		"stepBytes": C.sizeof_struct_sw_step, "stepSend": int(unsafe.Offsetof(st.send_bytes)), "stepRecv": int(unsafe.Offsetof(st.recv_bytes)),
	}
}
