// A picker that decides nothing, compiled: what Envoy's filter and two exchanges with another process cost at least.
//
//     floor_picker PORT DESTINATION HEAD
//
// PORT is a port of 127.0.0.1. DESTINATION and HEAD are the responses to a request's and to an answer's headers, in
// hexadecimal digits. Bodies go back unchanged. It speaks as much of HTTP/2 and gRPC as Envoy sends it.

#include <arpa/inet.h>
#include <malloc.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <unordered_map>

static std::string destination, head;
static const std::string CONTENT_TYPE = std::string("\0\x0c" "content-type\x10" "application/grpc", 31);
static const std::string TRAILERS = std::string("\0\x0b" "grpc-status\x01" "0", 15);
enum { DATA, HEADERS, PRIORITY, RESET, SETTINGS, PUSH, PING, GOAWAY, WINDOW_UPDATE };

static std::string number(uint32_t value) {
    return {char(value >> 24), char(value >> 16), char(value >> 8), char(value)};
}

static std::string frame(int kind, int flags, uint32_t stream, const std::string& payload) {
    std::string size = number(uint32_t(payload.size()));
    return size.substr(1) + char(kind) + char(flags) + number(stream) + payload;
}

static std::string varint(size_t value) {
    std::string digits;
    for (; value >= 0x80; value >>= 7) digits += char(value | 0x80);
    return digits + char(value);
}

static std::string nested(int field, const std::string& data) {
    return char(field << 3 | 2) + varint(data.size()) + data;
}

static size_t length_at(const std::string& data, size_t& at) {
    size_t value = 0;
    for (int shift = 0; at < data.size(); shift += 7) {
        unsigned char byte = data[at++];
        value |= size_t(byte & 0x7f) << shift;
        if (byte < 0x80) break;
    }
    return value;
}

struct Connection {
    std::string in, out;
    std::unordered_map<uint32_t, std::string> streams;  // Bytes of incomplete messages.
    bool has_preface = false;
    uint32_t num_read = 0;  // Bytes since the last WINDOW_UPDATE; a stream's window is larger than its bodies.

    void send_message(uint32_t stream, const std::string& message) {
        std::string data = '\0' + number(uint32_t(message.size())) + message;
        for (size_t at = 0; at < data.size(); at += 16384) out += frame(DATA, 0, stream, data.substr(at, 16384));
    }

    // Answers a message; its first byte is the tag of its first field.
    void answer(uint32_t stream, const std::string& message) {
        int kind = message.empty() ? 0 : static_cast<unsigned char>(message[0]) >> 3;
        if (kind == 2) {
            out += frame(HEADERS, 4, stream, '\x88' + CONTENT_TYPE);
            send_message(stream, destination);
        } else if (kind == 3) {
            send_message(stream, head);
        } else {
            size_t at = 1, begin = 0, size = 0;
            length_at(message, at);
            if (at < message.size() && message[at] == (1 << 3 | 2)) {
                size = length_at(message, ++at);
                begin = at;
                at += size;
            }
            std::string piece = size ? nested(1, message.substr(begin, size)) : "";
            bool is_last = at + 1 < message.size() && message[at] == 2 << 3 && message[at + 1] == 1;
            if (is_last) piece += "\x10\x01";
            // BodyResponse.response, CommonResponse.body_mutation, BodyMutation.streamed_response
            send_message(stream, nested(kind == 4 ? 3 : 4, nested(1, nested(3, nested(3, piece)))));
            if (kind == 5 && is_last) {
                out += frame(HEADERS, 5, stream, TRAILERS) + frame(RESET, 0, stream, number(0));
                streams.erase(stream);
            }
        }
    }

    void on_data(uint32_t stream, const std::string& payload, int flags) {
        auto found = streams.find(stream);
        if (found == streams.end()) return;
        num_read += uint32_t(payload.size());
        if (num_read >= 1 << 26) {
            out += frame(WINDOW_UPDATE, 0, 0, number(num_read));
            num_read = 0;
        }
        std::string& rest = found->second;
        rest += payload;
        while (rest.size() >= 5) {
            size_t size = ntohl(*reinterpret_cast<const uint32_t*>(rest.data() + 1));
            if (rest.size() < 5 + size) break;
            std::string message = rest.substr(5, size);
            rest.erase(0, 5 + size);
            answer(stream, message);
            if (!streams.count(stream)) return;
        }
        if (flags & 1) {
            out += frame(HEADERS, 5, stream, TRAILERS);
            streams.erase(stream);
        }
    }

    void receive(const char* data, size_t length) {
        in.append(data, length);
        size_t at = 0;
        if (!has_preface) {
            if (in.size() < 24) return;
            at = 24;
            has_preface = true;
            out += frame(SETTINGS, 0, 0, std::string("\0\x04", 2) + number(1 << 24));
            out += frame(WINDOW_UPDATE, 0, 0, number(1 << 28));
        }
        while (in.size() >= at + 9) {
            auto byte = [&](size_t place) { return uint32_t(static_cast<unsigned char>(in[at + place])); };
            size_t size = byte(0) << 16 | byte(1) << 8 | byte(2);
            if (in.size() < at + 9 + size) break;
            uint32_t kind = byte(3), flags = byte(4);
            uint32_t stream = (byte(5) << 24 | byte(6) << 16 | byte(7) << 8 | byte(8)) & 0x7fffffff;
            std::string payload = in.substr(at + 9, size);
            at += 9 + size;
            if (kind == DATA) on_data(stream, payload, int(flags));
            if (kind == HEADERS) streams[stream];
            if (kind == RESET) streams.erase(stream);
            if (kind == SETTINGS && !(flags & 1)) out += frame(SETTINGS, 1, 0, "");
            if (kind == PING && !(flags & 1)) out += frame(PING, 1, 0, payload);
        }
        in.erase(0, at);
    }
};

static int listen_at(const std::string& place) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(uint16_t(std::atoi(place.c_str())));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int listener = socket(AF_INET, SOCK_STREAM, 0), on = 1;
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    if (bind(listener, reinterpret_cast<sockaddr*>(&address), sizeof(address))) std::exit(2);
    return listener;
}

static std::string unhex(const std::string& digits) {
    std::string bytes;
    for (size_t at = 0; at + 1 < digits.size(); at += 2) bytes += char(std::stoi(digits.substr(at, 2), nullptr, 16));
    return bytes;
}

int main(int count, char** words) {
    if (count != 4) return std::fprintf(stderr, "floor_picker PORT DESTINATION HEAD\n"), 2;
    mallopt(M_MMAP_THRESHOLD, 1 << 28);  // Memory of large bodies is kept: page faults would take most of the time.
    mallopt(M_TRIM_THRESHOLD, 1 << 28);
    destination = unhex(words[2]);
    head = unhex(words[3]);
    int listener = listen_at(words[1]), polling = epoll_create1(0);
    listen(listener, 64);
    epoll_event event{EPOLLIN, {.fd = listener}};
    epoll_ctl(polling, EPOLL_CTL_ADD, listener, &event);
    std::unordered_map<int, Connection> connections;
    static char buffer[1 << 18];
    for (;;) {
        if (epoll_wait(polling, &event, 1, -1) < 1) continue;
        int place = event.data.fd;
        if (place == listener) {
            int made = accept(listener, nullptr, nullptr), on = 1;
            setsockopt(made, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
            event = {EPOLLIN, {.fd = made}};
            epoll_ctl(polling, EPOLL_CTL_ADD, made, &event);
            connections[made];
            continue;
        }
        ssize_t size = read(place, buffer, sizeof(buffer));
        if (size <= 0) {
            connections.erase(place);
            close(place);
            continue;
        }
        Connection& connection = connections[place];
        connection.receive(buffer, size_t(size));
        for (size_t at = 0; at < connection.out.size();) {
            ssize_t sent = write(place, connection.out.data() + at, connection.out.size() - at);
            if (sent <= 0) break;
            at += size_t(sent);
        }
        connection.out.clear();
    }
}
