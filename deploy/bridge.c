/* Joins the stdin and stdout of a MultiLangDaemon child to mldserver: bridge ADDRESS [CA CERTIFICATE KEY] [SECRET]
 *
 * ADDRESS is HOST:PORT, [IPV6]:PORT or unix:/path. With the three files (PEM) it speaks TLS, if it was built with OpenSSL:
 * cc -O2 -DTLS -o bridge bridge.c -lssl -lcrypto. It shows the server the secret that is in the file SECRET. The Java daemon starts one bridge for each shard. bridge.py is the
 * same program for machines without a compiler; tests/kcl/test_bridge.py holds both to one contract.
 *
 * - The daemon closes stdin: what is left goes out, then a half-close; all that, and late replies, have LINGER_MS.
 * - The server closes: stdout is flushed and closed by exiting. The daemon sees an EOF only that way.
 * - SIGINT, SIGTERM and SIGHUP are ignored: Ctrl-C reaches the whole process group, and the daemon still has to say
 *   shutdownRequested through this process.
 * - A server's host that vanishes without a word is noticed within a minute of silence: the daemon waits for an answer
 *   without any limit, and renews its lease meanwhile.
 * - Memory is two buffers, whatever the length of a line. Nothing is read before the last read was passed on, so each
 *   side feels the other's back-pressure.
 *
 * - With TLS the server's certificate must be for HOST. Either side's end counts without TLS's own good-bye too: lines are
 *   whole or not, so nobody on the way can make less of them.
 *
 * Exit code: 0 after either side's close, 1 when the server is not there or the connection breaks, 2 for a bad ADDRESS.
 */
#define _GNU_SOURCE
#include <ctype.h>
#include <errno.h>
#include <limits.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>
#ifdef __linux__
#include <sys/prctl.h>
#endif
#ifdef TLS
#include <fcntl.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#endif

enum { BUFFER = 65536, LINGER_MS = 2000, HANDSHAKE_SECONDS = 30, LONGEST_SECRET = 1024 };

struct flow {
    size_t start, end;
    int eof;
    char bytes[BUFFER];
};

static struct flow up, down; /* up: stdin to server; down: server to stdout */
static const char *address;
static char host[256];

static void die(int code, const char *what)
{
    fprintf(stderr, "mldserver bridge: %s: %s\n", address, what);
    exit(code);
}

static int connect_unix(const char *path)
{
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof name.sun_path)
        die(2, "the socket's path is too long");
    strcpy(name.sun_path, path);
    int server = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (server < 0 || connect(server, (struct sockaddr *)&name, sizeof name) < 0)
        die(1, strerror(errno));
    return server;
}

/* No TCP_USER_TIMEOUT: it would also end a connection whose server does not read for a while, for want of memory. */
static void notice_silence(int server)
{
    static const struct {
        int level, name, value;
    } options[] = {
        {SOL_SOCKET, SO_KEEPALIVE, 1},
#ifdef TCP_KEEPIDLE
        {IPPROTO_TCP, TCP_KEEPIDLE, 30}, /* seconds of silence before the first probe */
        {IPPROTO_TCP, TCP_KEEPINTVL, 10},
        {IPPROTO_TCP, TCP_KEEPCNT, 3},
#endif
    };
    for (size_t i = 0; i < sizeof options / sizeof *options; i++)
        setsockopt(server, options[i].level, options[i].name, &options[i].value, sizeof options[i].value);
}

static int connect_tcp(const char *text)
{
    const char *colon = strrchr(text, ':');
    size_t length = colon ? (size_t)(colon - text) : 0;
    if (length == 0 || length >= sizeof host || colon[1] == '\0')
        die(2, "not an address (HOST:PORT or unix:/path)");
    memcpy(host, text, length);
    host[length] = '\0';
    if (host[0] == '[' && host[length - 1] == ']') {
        host[length - 1] = '\0';
        memmove(host, host + 1, length - 1);
    }
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *found;
    int problem = getaddrinfo(host, colon + 1, &hints, &found);
    if (problem)
        die(1, gai_strerror(problem));
    for (struct addrinfo *at = found; at; at = at->ai_next) {
        int server = socket(at->ai_family, at->ai_socktype | SOCK_CLOEXEC, at->ai_protocol);
        if (server >= 0)
            notice_silence(server);
        if (server >= 0 && connect(server, at->ai_addr, at->ai_addrlen) == 0) {
            freeaddrinfo(found);
            return server;
        }
        problem = errno;
        if (server >= 0)
            close(server);
    }
    die(1, strerror(problem));
    return -1;
}

#ifdef TLS
static SSL *tls; /* NULL: clear text */

static void die_of_tls(void)
{
    long verified = tls ? SSL_get_verify_result(tls) : X509_V_OK;
    unsigned long error = ERR_peek_error();
    const char *reason = ERR_reason_error_string(error); /* NULL for the system's own */
    if (verified != X509_V_OK)
        die(1, X509_verify_cert_error_string(verified));
    if (reason && ERR_GET_REASON(error) >= SSL_AD_REASON_OFFSET) { /* an alert of the server's */
        char refusal[256];
        snprintf(refusal, sizeof refusal, "the server refuses this client: %s", reason);
        die(1, refusal);
    }
    die(1, reason ? reason : errno ? strerror(errno) : "the TLS connection broke");
}

/* An encrypted key is refused: by default OpenSSL asks the terminal, or the daemon's lines on stdin, for its password. */
static int no_password(char *buffer, int size, int encrypts, void *data)
{
    (void)buffer, (void)size, (void)encrypts, (void)data;
    return 0;
}

static void start_tls(int server, char **files)
{
    SSL_CTX *context = SSL_CTX_new(TLS_client_method());
    if (context)
        SSL_CTX_set_default_passwd_cb(context, no_password);
    if (!context || !SSL_CTX_set_min_proto_version(context, TLS1_2_VERSION) ||
        !SSL_CTX_load_verify_locations(context, files[0], NULL) ||
        SSL_CTX_use_certificate_chain_file(context, files[1]) != 1 ||
        SSL_CTX_use_PrivateKey_file(context, files[2], SSL_FILETYPE_PEM) != 1)
        die_of_tls();
    SSL_CTX_set_verify(context, SSL_VERIFY_PEER, NULL);
    SSL_CTX_set_mode(context, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER |
                                  SSL_MODE_RELEASE_BUFFERS);
#ifdef SSL_OP_IGNORE_UNEXPECTED_EOF
    SSL_CTX_set_options(context, SSL_OP_IGNORE_UNEXPECTED_EOF);
#endif
    struct timeval patience = {.tv_sec = HANDSHAKE_SECONDS};
    setsockopt(server, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    tls = SSL_new(context);
    if (!tls || !SSL_set_fd(tls, server))
        die_of_tls();
    if (!X509_VERIFY_PARAM_set1_ip_asc(SSL_get0_param(tls), host) &&
        !(SSL_set1_host(tls, host) && SSL_set_tlsext_host_name(tls, host)))
        die_of_tls();
    ERR_clear_error(); /* a name is no IP address, which counts as an error */
    errno = 0;
    if (SSL_connect(tls) != 1)
        die_of_tls();
    fcntl(server, F_SETFL, fcntl(server, F_GETFL) | O_NONBLOCK);
}

/* What read() and send() would return; EAGAIN where TLS has to wait for the other side. */
static ssize_t tls_result(int done)
{
    if (done > 0)
        return done;
    switch (SSL_get_error(tls, done)) {
    case SSL_ERROR_WANT_READ:
    case SSL_ERROR_WANT_WRITE:
        errno = EAGAIN;
        return -1;
    case SSL_ERROR_ZERO_RETURN:
        return 0;
    default:
        die_of_tls();
        return -1;
    }
}
#endif

static long long now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000LL + now.tv_nsec / 1000000;
}

/* Reads once into an empty flow. A broken connection ends the program; a broken stdin is an EOF. */
static void take(struct flow *flow, int from)
{
#ifdef TLS
    ssize_t got = tls && flow == &down ? tls_result(SSL_read(tls, flow->bytes, BUFFER)) : read(from, flow->bytes, BUFFER);
#else
    ssize_t got = read(from, flow->bytes, BUFFER);
#endif
    if (got < 0 && (errno == EINTR || errno == EAGAIN))
        return;
    if (got < 0 && flow == &down)
        die(1, strerror(errno));
    if (got <= 0) {
        flow->eof = 1;
        return;
    }
    flow->start = 0;
    flow->end = (size_t)got;
}

/* Passes on what fits without blocking: poll() promises PIPE_BUF bytes on a pipe, MSG_DONTWAIT serves the socket. */
static void give(struct flow *flow, int to)
{
    size_t left = flow->end - flow->start;
#ifdef TLS
    ssize_t gone = flow == &up && tls ? tls_result(SSL_write(tls, flow->bytes + flow->start, (int)left))
                   : flow == &up      ? send(to, flow->bytes + flow->start, left, MSG_DONTWAIT | MSG_NOSIGNAL)
                                 : write(to, flow->bytes + flow->start, left < PIPE_BUF ? left : PIPE_BUF);
#else
    ssize_t gone = flow == &up ? send(to, flow->bytes + flow->start, left, MSG_DONTWAIT | MSG_NOSIGNAL)
                               : write(to, flow->bytes + flow->start, left < PIPE_BUF ? left : PIPE_BUF);
#endif
    if (gone < 0 && (errno == EINTR || errno == EAGAIN))
        return;
    if (gone < 0)
        die(1, strerror(errno));
    flow->start += (size_t)gone;
}

static int empty(const struct flow *flow) { return flow->start == flow->end; }

/* Puts the line that shows the server the secret in a file before the daemon's first. */
static void show_secret(const char *path)
{
    static const char prefix[] = "mldserver-secret ";
    char *word = up.bytes + sizeof prefix - 1;
    FILE *file = fopen(path, "r");
    if (!file) {
        address = path; /* the message is about the file */
        die(1, strerror(errno));
    }
    size_t length = fread(word, 1, LONGEST_SECRET, file);
    fclose(file);
    while (length && isspace((unsigned char)word[length - 1]))
        length--;
    size_t blank = 0;
    while (blank < length && isspace((unsigned char)word[blank]))
        blank++;
    memmove(word, word + blank, length -= blank);
    memcpy(up.bytes, prefix, sizeof prefix - 1);
    word[length] = '\n';
    up.end = sizeof prefix + length;
}

int main(int count, char **arguments)
{
    int usable = count == 2 || count == 3 || count == 5 || count == 6;
    address = usable ? arguments[1] : "usage";
    if (!usable)
        die(2, "bridge HOST:PORT | unix:/path [CA CERTIFICATE KEY] [SECRET]");
#ifdef __linux__
    prctl(PR_SET_NAME, "mld-bridge"); /* mldserver kcl starts it from memory, where it has no name */
#endif
    signal(SIGINT, SIG_IGN);
    signal(SIGTERM, SIG_IGN);
    signal(SIGHUP, SIG_IGN);
    signal(SIGPIPE, SIG_IGN);
    if (count == 3 || count == 6)
        show_secret(arguments[count - 1]);
    int server = strncmp(address, "unix:", 5) == 0 ? connect_unix(address + 5) : connect_tcp(address);
    if (count >= 5 && *host) {
#ifdef TLS
        start_tls(server, arguments + 2);
#else
        die(2, "built without OpenSSL");
#endif
    }
    int half_closed = 0, hung_up = 0;
    long long deadline = 0;
    for (;;) {
        if (down.eof && empty(&down))
            return 0;
        if (up.eof && empty(&up) && !half_closed)
            half_closed = 1, shutdown(server, SHUT_WR);
        if ((up.eof || hung_up) && !deadline)
            deadline = now_ms() + LINGER_MS;
        int wait = deadline ? (int)(deadline - now_ms()) : -1;
        if (deadline && wait <= 0)
            return 0;
        short socket_events = (empty(&down) && !down.eof ? POLLIN : 0) | (empty(&up) ? 0 : POLLOUT);
        int readable = empty(&up) && !up.eof;
        struct pollfd waits[] = {
            {.fd = readable || !hung_up ? 0 : -1, .events = readable ? POLLIN : 0},
            {.fd = 1, .events = empty(&down) ? 0 : POLLOUT},
            {.fd = socket_events ? server : -1, .events = socket_events},
        };
        if (poll(waits, 3, wait) < 0) {
            if (errno == EINTR)
                continue;
            die(1, strerror(errno));
        }
        if (waits[1].revents & (POLLERR | POLLNVAL))
            return 0; /* nobody reads stdout any more: the daemon is gone */
        if (waits[1].revents & POLLOUT)
            give(&down, 1);
        if (waits[2].revents & POLLOUT && !empty(&up))
            give(&up, server);
        if (waits[2].revents & (POLLIN | POLLHUP | POLLERR) && empty(&down))
            take(&down, server);
        if (waits[0].revents & (POLLHUP | POLLERR))
            hung_up = 1; /* seen even while a server that does not read keeps the rest in the pipe */
        if (waits[0].revents && readable)
            take(&up, 0);
    }
}
