// clang-format off
//go:build cgo && linux
// clang-format on

// Puts: at the rank that sends them, and where they land.
#include "swucx_rail.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static stream *find(stream **table, uint32_t peer, int64_t signal)
{
	stream **at = &table[((uint64_t)signal / 8 * 31 + peer) % BUCKETS];
	for (stream *s = *at; s != NULL; s = s->next)
		if (s->peer == peer && s->signal == signal)
			return s;
	stream *s = calloc(1, sizeof *s);
	if (s == NULL)
		return NULL;
	s->peer = peer, s->signal = signal, s->next = *at;
	return *at = s;
}

static int is_open(const swu_rail *r, int64_t off, int64_t n)
{
	for (int i = 0; i < r->window_count; i++) {
		int64_t from = r->windows[i].off, to = from + r->windows[i].n;
		if (off >= from && off <= to && n <= to - off)
			return 1;
	}
	return 0;
}

// begin notes a put that lands, NULL where there is no memory.
static landing *begin(swu_rail *r, stream *s, uint64_t seq)
{
	landing *l = malloc(sizeof *l);
	if (l == NULL)
		return NULL;
	*l = (landing){s->landings, r, s, seq, 0};
	return s->landings = l;
}

// is_known says of a put whether it has landed, or lands.
static int is_known(const stream *s, uint64_t seq)
{
	if (seq <= s->seq)
		return 1;
	for (const landing *l = s->landings; l != NULL; l = l->next)
		if (l->seq == seq)
			return 1;
	return 0;
}

// publish raises the word as far as puts have landed.
static void publish(swu_rail *r, stream *s)
{
	uint64_t before = s->seq;
	for (landing **at = &s->landings; *at != NULL;) {
		landing *l = *at;
		if (!l->landed || l->seq != s->seq + 1) {
			at = &l->next;
			continue;
		}
		s->seq = l->seq;
		*at = l->next;
		free(l);
		at = &s->landings;
	}
	if (s->seq != before)
		__atomic_store_n((uint64_t *)(r->segment + s->signal), s->seq, __ATOMIC_SEQ_CST);
}

static void on_landed(void *request, int8_t status, size_t length, void *arg)
{
	landing *l = arg;
	swu_rail *r = l->rail;
	(void)length;
	if (status == OK) {
		l->landed = 1;
		r->counts.landed++;
		publish(r, l->s);
	} else
		r->peers[l->s->peer].failed = status, r->counts.failures++;
	if (request != NULL)
		r->ucp_request_free(request);
}

int8_t swu_on_put(void *arg, const void *header, size_t header_length, void *data, size_t length,
                  const uint64_t *recv_attr)
{
	swu_rail *r = arg;
	head h;
	if (r->closing && header_length != sizeof h)
		return OK;
	if (header_length != sizeof h)
		goto refuse;
	memcpy(&h, header, sizeof h);
	if (h.signal == GREETING && h.n == 0) {
		if (h.key == r->key && h.zero == 0 && h.from < r->size && h.from != r->rank)
			r->peers[h.from].heard = 1;
		return OK;
	}
	if (r->closing)
		return OK;
	if (h.key != r->key || h.zero != 0 || h.from >= r->size || h.from == r->rank || h.n < 0 ||
	    (uint64_t)h.n != length || h.place < 0 || h.signal < 0 || h.signal % 8 != 0 || !is_open(r, h.signal, 8) ||
	    (h.n > 0 && !is_open(r, h.place, h.n)))
		goto refuse;
	stream *s = find(r->got, h.from, h.signal);
	if (s == NULL || is_known(s, h.seq))
		goto refuse;
	landing *l = begin(r, s, h.seq);
	if (l == NULL)
		goto refuse;
	if (!(*recv_attr & RECV_RNDV)) {
		memcpy(r->segment + h.place, data, h.n);
		on_landed(NULL, OK, h.n, l);
		return OK;
	}
	swu_request_param p = {.mask = OP_CALLBACK | OP_USER_DATA, .cb.recv = on_landed, .user_data = l};
	void *q = r->ucp_am_recv_data_nbx(r->worker, data, r->segment + h.place, h.n, &p);
	if (q == NULL)
		on_landed(NULL, OK, h.n, l);
	else if (is_error(q))
		on_landed(NULL, status_of(q), 0, l);
	return IN_PROGRESS;
refuse:
	r->counts.refused++;
	return OK;
}

static void on_sent(void *request, int8_t status, void *arg)
{
	sending *s = arg;
	swu_rail *r = s->rail;
	// A peer that is gone is noticed by its error handler.
	if (status == OK && s->h.signal == GREETING)
		s->to->greeted = 1;
	r->counts.sending--;
	s->left = 1;
	while (r->oldest != NULL && r->oldest->left) {
		sending *first = r->oldest;
		if ((r->oldest = first->next) == NULL)
			r->newest = NULL;
		r->counts.left += first->h.signal != GREETING;
		free(first);
	}
	if (request != NULL)
		r->ucp_request_free(request);
}

int swu_window(swu_rail *r, int64_t off, int64_t n)
{
	if (r->window_count == MAX_WINDOWS)
		return -1;
	int last = r->window_count - 1;
	if (last >= 0 && r->windows[last].off + r->windows[last].n == off) {
		r->windows[last].n += n;
		return 0;
	}
	r->windows[r->window_count].off = off;
	r->windows[r->window_count++].n = n;
	return 0;
}

int swu_put(swu_rail *r, uint32_t to, int64_t place, const void *src, int64_t n, int64_t signal, char *why,
            size_t why_len)
{
	peer *p = &r->peers[to];
	if (p->ep == NULL)
		FAIL("rank %u is not connected", to);
	stream *s = find(r->sent, to, signal);
	sending *q = malloc(sizeof *q);
	if (s == NULL || q == NULL) {
		free(q);
		FAIL("out of memory");
	}
	*q = (sending){
	    NULL, r, p, {.key = r->key, .from = r->rank, .place = place, .n = n, .signal = signal, .seq = ++s->seq}, 0};
	if (r->newest != NULL)
		r->newest->next = q;
	else
		r->oldest = q;
	r->newest = q;
	r->counts.begun += signal != GREETING;
	swu_request_param op = {.mask = OP_CALLBACK | OP_USER_DATA, .cb.send = on_sent, .user_data = q};
	r->counts.sending++;
	void *request = r->ucp_am_send_nbx(p->ep, AM_PUT, &q->h, sizeof q->h, src, n, &op);
	if (request == NULL)
		on_sent(NULL, OK, q);
	else if (is_error(request)) {
		on_sent(NULL, status_of(request), q);
		p->failed = status_of(request);
	}
	return 0;
}

// drop ends the streams of words from one place to before another.
static void drop(stream **table, int64_t from, int64_t to)
{
	for (int i = 0; i < BUCKETS; i++)
		for (stream **at = &table[i]; *at != NULL;) {
			stream *s = *at;
			if (s->signal < from || s->signal >= to) {
				at = &s->next;
				continue;
			}
			*at = s->next;
			while (s->landings != NULL) {
				landing *l = s->landings;
				s->landings = l->next;
				free(l);
			}
			free(s);
		}
}

void swu_forget(swu_rail *r, int64_t from, int64_t to)
{
	drop(r->sent, from, to);
	drop(r->got, from, to);
}
