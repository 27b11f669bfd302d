/** A server of grpc-js, for answers that no daemon gives, or whose moment a test chooses. */

import { Server, ServerCredentials, type UntypedServiceImplementation } from "@grpc/grpc-js";

type Service = Parameters<Server["addService"]>[0];

/** Serves these calls of a service; no test makes the others. */
export function serve(server: Server, service: Service, calls: UntypedServiceImplementation): void {
  const unused = Object.keys(service).map((name) => [name, () => undefined] as const);
  server.addService(service, { ...Object.fromEntries(unused), ...calls });
}

/** Where the server listens. */
export async function listening(server: Server): Promise<string> {
  return new Promise((resolve, reject) => {
    server.bindAsync("127.0.0.1:0", ServerCredentials.createInsecure(), (error, port) => {
      if (error === null) resolve(`127.0.0.1:${port}`);
      else reject(error);
    });
  });
}
